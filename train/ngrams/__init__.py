"""`specdec-train ngrams`: data files and a tokenizer -> a table of n-grams."""
