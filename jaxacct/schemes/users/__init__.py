"""Schemes whose privacy unit is a user with several examples.

Read in this order:

* `multi_attribution`: one process a user, counts at every participation;
* `independent_attribution`: an independent process for each of the user's examples.
"""
