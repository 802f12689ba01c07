"""What a scheme is made of, besides its table.

Read in this order:

* `scheme`: the protocol `Scheme`, and `ExampleScheme`, which a sampling table alone defines;
* `structure`: what a scheme states of itself: sums, other draws, the adversary's view;
* `numbers`: plain numbers that define a scheme, as on the command line;
* `batches` and `batch_sizes`: the trainer's batches, and their largest size.
"""
