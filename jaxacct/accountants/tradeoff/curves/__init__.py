"""Trade-off functions: closed forms, composition, subsampling and conversion."""
