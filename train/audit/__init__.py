"""Attacks with canaries on a training run, and lower bounds on epsilon from them."""
