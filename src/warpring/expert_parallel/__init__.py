"""Expert-parallel decode: several GPUs share the experts of a layer."""
