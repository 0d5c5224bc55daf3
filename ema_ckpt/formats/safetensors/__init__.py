"""safetensors files and Hugging Face directories of them."""
