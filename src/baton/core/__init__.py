"""The vocabulary that every other package speaks: values, messages, configuration, errors. No I/O."""
