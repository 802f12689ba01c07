"""What a scheme is made of, besides its table.

Read in this order:

* `scheme`: the protocol `Scheme`, and what the adversary sees besides the outputs;
* `example_scheme`: `ExampleScheme`, which a sampling table alone defines;
* `numbers`: plain numbers that define a scheme, as on the command line;
* `batches` and `batch_sizes`: the trainer's batches, and their largest size.
"""
