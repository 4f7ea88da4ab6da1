"""What the commands of `fwzoo` do, one module each; imported only when their command runs."""
