"""The life of a cluster: hosts prepared, ranks launched, watched, lost, launched again, ended."""
