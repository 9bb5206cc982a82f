"""Model layouts and forward passes, one file per architecture."""
