"""`mooncakectl plan`: the cheapest pools that keep an SLO for a trace."""
