"""One operator on plain tensors: two query tokens that match two neighbouring keys."""

import torch

from heedful import Visibility, multi_token_attention

torch.manual_seed(0)
text = "red car blue bus red bus blue car red bus"
words = text.split()
vocabulary = sorted(set(words))
x = torch.eye(len(vocabulary))[[vocabulary.index(word) for word in words]]  # one-hot: [T, D]
q = 4 * x[None, None]  # [batch, heads, T, D]
k = x[None, None].clone()
k[:, :, -2:] = 0  # the last two tokens ask; they are no answer
v = torch.eye(len(words))[None, None]  # values that show the map itself

# The last row meets the current query and the centre column the same key. A one above and to the
# left of the centre adds "the previous query matches the previous key".
conv = torch.zeros(1, 2, 3)
conv[0, -1, 1] = conv[0, 0, 0] = 1

for name, kernel in (("standard", None), ("multi-token", conv)):
    weights = multi_token_attention(q, k, v, conv=kernel, scale=1.0)[0, 0, -1]
    matches = [f"{words[i - 1]} {words[i]} ({weights[i]:.2f})" for i in weights.topk(2).indices]
    print(f"{name:<12} {', '.join(matches)}")

# Who sees whom is one object for every operator; the same call on two packed documents:
documents = Visibility.packed(torch.tensor([0, 4, 10]))
weights = multi_token_attention(q, k, v, conv=conv, visibility=documents, scale=1.0)[0, 0, -1]
print(f"the second document sees {int((weights > 0).sum())} of {len(words)} tokens")
assert weights.argmax() == 5 and weights[:4].sum() == 0
