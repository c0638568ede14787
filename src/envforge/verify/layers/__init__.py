"""The layers of the proof, one module each, in the order environment, data, chat, training, (distributed,) effect."""
