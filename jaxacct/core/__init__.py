"""The trusted core: the claim, the evidence, and the check that the evidence proves the claim."""
