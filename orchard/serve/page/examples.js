// Something to begin with: ways to ask, a schema and a tool.

export const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    age: { type: "integer", minimum: 0, maximum: 120 },
    hobbies: { type: "array", items: { type: "string", maxLength: 40 }, minItems: 1, maxItems: 3 },
  },
  required: ["name", "age", "hobbies"],
  additionalProperties: false,
};

export const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 40 }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city", "unit"],
        additionalProperties: false,
      },
    },
  },
];

/** What the first screen offers; `mode` switches something on as well. */
export const SUGGESTIONS = [
  { title: "Explain something", words: "Explain in three sentences why leaves change colour in autumn." },
  { title: "Write something", words: "Write a short poem about an old apple tree." },
  { title: "Answer as JSON", words: "Invent a person who keeps bees.", mode: "schema" },
  { title: "Call a tool", words: "What is the weather in Oslo, in celsius?", mode: "tools" },
];
