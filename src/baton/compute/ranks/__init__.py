"""One model on several rank processes: the part of each rank, and the exchange between them."""
