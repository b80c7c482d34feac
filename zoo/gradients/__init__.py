"""What layers of several families need where they learn: products in a lower precision, and sums over rows."""
