"""The workshop of the experiments: runs described as data, trained once, shared where they have a past in common."""
