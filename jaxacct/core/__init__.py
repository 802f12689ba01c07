"""The trusted core: what is claimed, what was drawn, and the check that one proves the other."""
