"""Twenty prompts of different kinds for comparing answers."""

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses for a paperclip.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Pride and Prejudice?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "def fibonacci(n):",
    "Name the planets of the solar system.",
    "What should I pack for a week in the mountains?",
    "Tell me a joke about computers.",
    "How does a bicycle stay upright?",
    "Write a short thank-you note to a teacher.",
    "What is the difference between a virus and a bacterium?",
    "Complete the sentence: The old man and the",
    "¿Dónde está la biblioteca?",
    "Suggest a name for a café run by 🐱 cats.",
]
