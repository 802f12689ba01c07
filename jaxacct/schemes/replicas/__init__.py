"""One file a scheme: the law of several participation vectors that attract each other."""
