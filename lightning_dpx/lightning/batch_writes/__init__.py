"""What a step writes into its batch, and how hooks find it there."""
