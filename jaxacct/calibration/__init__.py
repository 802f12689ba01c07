"""The smallest noise multiplier that is certified."""
