"""Strategy matrices C: how noise is correlated."""
