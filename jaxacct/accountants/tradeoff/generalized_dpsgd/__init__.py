"""Generalised DP-SGD with shuffled or fixed-size batches (arXiv 2212.05796)."""
