"""Where KV rests outside the device: in host memory, on disk, over the network; one seam."""
