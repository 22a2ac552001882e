"""What processes of one machine share: C++ that is compiled on it, memory that is lent, copies of runs of bytes."""
