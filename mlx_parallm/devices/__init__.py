"""What differs between the CPU, Metal and CUDA: profiles, kernels with their sources, padding, freed memory."""
