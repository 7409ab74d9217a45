"""One row for each architecture."""
