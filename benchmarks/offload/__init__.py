"""`python -m benchmarks offload`: a decode step whose KV is not on the device, arm beside arm."""
