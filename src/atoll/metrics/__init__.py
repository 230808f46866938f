"""What ranks tell of themselves over time: kept in bounded series, one for each rank and name."""
