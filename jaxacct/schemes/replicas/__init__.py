"""Joint distributions of several attracting participation vectors, one scheme per file."""
