"""The zoo's own operators. Each is a function with a torch reference and a Triton kernel that the compiler sees."""
