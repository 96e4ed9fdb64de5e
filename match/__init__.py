"""Stage `match`: the drafters that fit a model, by headers alone, and why others do not."""
