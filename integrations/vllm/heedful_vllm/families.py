"""Which families are served, by transformers' name of the model and by that of ours."""

MODEL_TYPE = "heedful"
"""What the `config.json` of a converted folder calls itself."""

FAMILIES = {
    f"{name}ForCausalLM": f"Heedful{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
