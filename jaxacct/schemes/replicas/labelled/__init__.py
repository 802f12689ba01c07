"""Two replicas whose participations have labels.

Read in this order:

* `walk`: weights, tables and draws of any labels;
* `multi_attribution`: a label is the count of a user's examples;
* `truncated`: a label is whether the step was truncated.
"""
