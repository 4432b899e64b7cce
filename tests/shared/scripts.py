"""Parts of the scripts that tests run in processes of their own."""

# A model, its optimizer and a step.
TRAINING = """
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""
