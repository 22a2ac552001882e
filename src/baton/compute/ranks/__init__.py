"""One model over several rank processes: what each of them computes, and how they agree."""
