"""Models and their losses: what a user brings, and what is kept of it.

Read `loss` first (the loss of one example and what it reads), then `networks` (small models without batch
norm), `lora` (adapters) and `saving` (`save_model`, `load_model`, and `load_weights` that others wrote).
"""
