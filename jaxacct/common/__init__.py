"""Files, records, checks of plain values and progress: what every other folder may use."""
