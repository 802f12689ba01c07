"""A search over schemes and matrices, ranked by estimates."""
