"""`mooncakectl simulate`: a manifest and a trace in, what its users would see out."""
