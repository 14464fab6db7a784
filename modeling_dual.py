"""
The bidirectional half of a dual model, for transformers; load it with trust_remote_code=True.

    AutoModelForMaskedLM                 row i of the logits predicts token i + 1, masked or not;
                                         generate() reads the prompt in both directions
    AutoModel                            the hidden states alone, to be fine-tuned as an encoder
    AutoModelForSequenceClassification   the same with a new head, which reads the last token

AutoModelForCausalLM needs none of this: it loads the same weights as a plain Llama.

To score a text of T tokens with a prefix of n, tell AutoModelForMaskedLM who sees whom:

    mask = torch.ones(1, T, T).tril()    # row i: which tokens token i sees
    mask[:, :, :n] = 1
    logits = model(input_ids, attention_mask=mask).logits

A plain Llama needs it in additive form, torch.where(mask == 0, -torch.inf, 0.0)[:, None]; with
attn_implementation="eager" it silently misreads a boolean one.
"""

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel


class DualModel(LlamaModel):
    """A Llama in which every token sees all tokens before and after it, except for padding."""

    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]

    def forward(self, input_ids=None, attention_mask=None, *, inputs_embeds=None, **kwargs):
        """Return the hidden states of B texts of T tokens; any cached tokens come before these.

        attention_mask: (B, T), where 0 is padding; or (B, T, T), where row i is 0 at the tokens
        that token i does not see; or (B, 1, T, T), a number to add to each attention score.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        B, T, _ = inputs_embeds.shape
        if attention_mask is None:
            cache = kwargs.get("past_key_values")
            n_cached = 0 if cache is None else cache.get_seq_length()
            attention_mask = inputs_embeds.new_ones(B, n_cached + T)
        if attention_mask.ndim < 4 or attention_mask.dtype == torch.bool:
            n_keys = attention_mask.shape[-1]
            sees = attention_mask.view(B, 1, -1, n_keys).expand(B, 1, T, n_keys) != 0
            # Low enough to hide a token, and finite in every floating-point type.
            attention_mask = torch.where(sees, 0.0, -30000.0).to(inputs_embeds.dtype)
        return super().forward(attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)


class DualForMaskedLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = DualModel(config)
        self.loss_type = "ForCausalLM"  # with labels: row i against label i + 1
        self.post_init()


class DualForSequenceClassification(LlamaForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.model = DualModel(config)
        self.post_init()


# These calls make save_pretrained() copy this file.
DualModel.register_for_auto_class("AutoModel")
DualForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
DualForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
