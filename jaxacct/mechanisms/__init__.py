"""What is accounted for: a scheme, a strategy and a noise multiplier."""
