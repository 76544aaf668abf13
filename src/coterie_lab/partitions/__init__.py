"""The partitions of the published studies, made from public data sets."""
