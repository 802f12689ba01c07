"""Files, records, checks of plain values and progress: usable from every package."""
