"""All-reduce through an object store."""
