"""What is averaged: requests on the wire, buckets, flat parameters."""
