"""Looking into the functions of a user: the tensors they capture, their code, and copies with other tensors."""
