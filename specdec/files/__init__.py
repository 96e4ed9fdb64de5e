"""Files and folders: tensors, JSON, outputs written aside, manifests."""
