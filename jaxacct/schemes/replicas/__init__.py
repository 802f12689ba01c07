"""One file a scheme: the distribution of several participation vectors that attract each other."""
