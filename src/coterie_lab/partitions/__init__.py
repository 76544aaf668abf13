"""The partitions of the published studies, cut from public data sets."""
