"""A model: its sizes, arithmetic, tensors and how they split over ranks."""
