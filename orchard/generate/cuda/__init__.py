"""The same plan on CUDA: weights and a paged store on the device, one recorded graph per size of batch."""
