"""One file a family of proposal distributions."""
